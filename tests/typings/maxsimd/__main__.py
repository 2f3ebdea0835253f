"""`python -m maxsimd`: the command `maxsimd`."""

from maxsimd.api.cli import main

if __name__ == "__main__":
    main(prog_name="maxsimd")
