"""The HTTP server: routes, middleware, admission, and the processes that serve a port."""
