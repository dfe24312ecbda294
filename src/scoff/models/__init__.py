"""Networks around the recurrent layers: an encoder before, a decoder after."""
