"""Image inputs: file headers, decoding, and the preprocessing of each model family."""
