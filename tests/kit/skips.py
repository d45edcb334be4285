"""Reasons of skipped tests, which say what would run them."""

NO_TRITON = "the kernels need triton, which has no build for this platform"


def needs(extra: str) -> str:
    return f'needs the [{extra}] extra: pip install ".[{extra}]"'
