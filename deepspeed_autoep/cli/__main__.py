"""``python -m deepspeed_autoep.cli``: the same as the command ``deepspeed-autoep``."""

from deepspeed_autoep.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
