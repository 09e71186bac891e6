"""Retries of generation: a repeated request joins the running request, or gets the answer that was kept."""
