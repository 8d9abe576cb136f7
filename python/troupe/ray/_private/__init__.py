"""The private names of Ray that programs import; modules of this package list what each does."""
