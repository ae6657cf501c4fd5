"""`python -m aprfmt` is `apr`."""

from aprfmt.cli.main import main

if __name__ == "__main__":
    main()
