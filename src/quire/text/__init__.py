"""The text plane's strings: tokenizers, chat templates, incremental detokenisation and stop strings.

Import what you need from its files; the package itself loads nothing.
"""
