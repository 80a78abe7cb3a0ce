"""`python -m sglang_aiter_moe` is the command `sglang-aiter-moe`."""

from sglang_aiter_moe.cli import app

if __name__ == "__main__":
    app(prog_name="sglang-aiter-moe")
