"""An HTTP server that translates, with the requests and responses of LibreTranslate."""
