"""One file a wire format; found by itself."""
