"""The training program of scripts/mutate: small, plain torch, put together from a recipe. It knows nothing of tdbg."""
