"""PNG files of the figures of this folder."""

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def save(figure, file):
    """Save a figure as a PNG; file: path in the repository."""
    figure.savefig(REPOSITORY / file, dpi=100, facecolor="white")
    print(f"Saved {file}")
