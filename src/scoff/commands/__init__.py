"""The commands of `scoff`, a module each. Heavy modules are imported where they are used."""
