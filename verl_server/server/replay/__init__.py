"""Retried generation: a request that comes again joins the running one, or gets the answer that was kept."""
