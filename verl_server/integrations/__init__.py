"""Parts that other projects load, so that they train through this server. Nothing else in the package imports them."""
