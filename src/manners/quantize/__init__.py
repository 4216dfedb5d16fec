"""A parent becomes a candidate: plans, statistics, scale rules."""

from .candidate import Candidate, quantize
from .plan import STRATEGIES, LinearPlan, Plan, Rung, bits_per_weight, load_plan, make_plan
from .statistics import activation_amax, weight_amax

__all__ = [
    "STRATEGIES",
    "Candidate",
    "LinearPlan",
    "Plan",
    "Rung",
    "activation_amax",
    "bits_per_weight",
    "load_plan",
    "make_plan",
    "quantize",
    "weight_amax",
]
