"""A stand-in of ROLL: the names that troupe.adapters.roll uses, with ROLL's documented signatures and meanings, on
`ray`. `make adapters-check` runs the adapter with ROLL itself."""
