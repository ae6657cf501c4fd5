"""`python -m aprfmt` is `apr`."""

import os
import sys

# Python searches the current folder first: what lies there must not be imported in place of an installed package.
if not sys.flags.safe_path and sys.path[0] != os.path.dirname(os.path.dirname(os.path.abspath(__file__))):
    del sys.path[0]

from aprfmt.cli.main import main

if __name__ == "__main__":
    main()
