"""``python -m inductor_passes``: the command ``inductor-passes``."""

from inductor_passes.cli.main import app

if __name__ == "__main__":
    app()
