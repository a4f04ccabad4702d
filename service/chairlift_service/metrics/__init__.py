"""What Prometheus is told. Off unless `metrics_listen` names an address."""
