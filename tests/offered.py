"""A tool with a parameter of every type, as it is offered to a model in tests of the chat."""

from typing import Any

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "book",
            "description": "Book a table",
            "parameters": {
                "type": "object",
                "properties": {
                    "place": {"type": "string"},
                    "seats": {"type": "integer"},
                    "price": {"type": "number"},
                    "window": {"type": "boolean"},
                    "guests": {"type": "array", "items": {"type": "string"}},
                    "extra": {"type": "object"},
                    "note": {"type": ["string", "null"]},
                    "table": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                },
            },
        },
    }
]
