"""Model folders: reading parents, writing candidates in the canonical form, checking both."""

from .canonical import PORTABLE_WIDTH, parent_linears, refuse_quantized, width_error, write_canonical
from .fingerprint import fingerprint_weights
from .lint import check, lint
from .lint_config import Finding
from .load import load_model, replace_linears
from .names import canonical_name, default_ignore, expected_linears, fused_groups, fused_key, linear_names
from .reader import Checkpoint, Shard, check_finite, open_checkpoint, read_json
from .roundtrip import MAX_KL, RoundTrip, compare_logits, kl_nats, round_trip

__all__ = [
    "MAX_KL",
    "PORTABLE_WIDTH",
    "Checkpoint",
    "Finding",
    "RoundTrip",
    "Shard",
    "canonical_name",
    "check",
    "check_finite",
    "compare_logits",
    "default_ignore",
    "expected_linears",
    "fingerprint_weights",
    "fused_groups",
    "fused_key",
    "kl_nats",
    "linear_names",
    "lint",
    "load_model",
    "open_checkpoint",
    "parent_linears",
    "read_json",
    "refuse_quantized",
    "replace_linears",
    "round_trip",
    "width_error",
    "write_canonical",
]
