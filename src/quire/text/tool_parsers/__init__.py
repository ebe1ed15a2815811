"""Incremental parsers of model output: reasoning, tool calls and text. They are state machines over characters, linear
in the text; the result does not depend on how the text is split.
"""
