"""From transcripts to verdicts, on any CPU, without torch and without a server.

``gates`` says for one reply what it broke, ``text`` holds the rules about text that gates use,
``statistics`` counts, ``verdicts`` decides. Nothing is imported here.
"""
