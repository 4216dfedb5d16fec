"""Talking to a server: it knows a URL and a model's name, never an engine.

``sse`` reads an event stream, ``reply`` puts its chunks together, ``client`` asks one question and
names what went wrong, ``ask`` puts a whole set of probes, ``transcripts`` is the file they leave.
Nothing is imported here, so that ``judge`` can read transcripts without loading an HTTP library.
"""
