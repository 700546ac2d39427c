"""What Prometheus is told of a worker, read from it when it is scraped; ``collector`` joins the parts."""
