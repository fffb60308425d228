"""`python -m tokenflow`."""

from tokenflow.cli import main

if __name__ == "__main__":
    main(prog_name="tokenflow")
