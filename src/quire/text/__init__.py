"""Text processing: tokenizers, chat templates, incremental detokenization, stop strings, images, grammars, tool calls.

Import from its modules; the package itself imports nothing.
"""
