"""`tdbg-run`: starts torchrun with an agent in every rank and watches the node; see README.md."""
