"""The runtime type checker of the tests: beartype, with PEP 484's numbers (an int is a float)."""

from beartype import BeartypeConf, beartype

checker = beartype(conf=BeartypeConf(is_pep484_tower=True))
