"""kvevict for message histories: formats, validation, policies, the manager and replay. Loads no torch."""
