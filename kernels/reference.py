"""Reference operations."""
