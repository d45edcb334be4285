"""Vocabulary-sharded fused linear cross entropy for PyTorch."""
