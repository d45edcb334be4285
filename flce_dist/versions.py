"""What the installed torch must be; imported before anything that an older one lacks."""

import torch

OLDEST_TORCH = (2, 11)


def check_torch(version: str) -> None:
    """
    Raises:
        ImportError: the version is older than this package can run with.
    """
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise ImportError(f"flce_dist needs torch {oldest} or newer, {version} is installed")


check_torch(torch.__version__)
