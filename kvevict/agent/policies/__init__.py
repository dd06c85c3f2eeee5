"""One file a message policy; found by itself."""
