"""What a model says, read as it comes: thoughts, calls of tools, and the rest. State machines over characters, linear
in the text, that find the same wherever the text is cut.
"""
