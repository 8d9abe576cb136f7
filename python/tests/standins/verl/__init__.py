"""A stand-in of verl: the names that troupe.adapters.verl uses, with verl's documented signatures and meanings, on
`ray`. `make adapters-check` runs the adapter with verl itself."""
