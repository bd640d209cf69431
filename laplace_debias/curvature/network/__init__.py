"""The one way to see a network: its inputs, its parameters, the data it is run on."""
