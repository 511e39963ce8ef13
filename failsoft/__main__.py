"""``python -m failsoft``."""

from failsoft.cli import main

main()
