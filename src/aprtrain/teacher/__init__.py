"""The frozen teacher."""
