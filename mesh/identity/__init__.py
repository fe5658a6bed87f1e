"""Who a node or a tenant is: places, certificates, API keys, signing."""
