# What a kvmesh process may do in Consul, with the default prefix "kvmesh" (registry.prefix):
#   consul acl policy create -name kvmesh -rules @deploy/consul/kvmesh-acl.hcl
#   consul acl token create -policy-name kvmesh     and its secret into the file that registry.token_file names
# The keys hold tenants' salts and key hashes: give this policy to kvmesh processes only.
service_prefix "kvmesh-" {
  policy = "write"
}
key_prefix "kvmesh/" {
  policy = "write"
}
node_prefix "" {
  policy = "read"
}
agent_prefix "" {
  policy = "read"
}
session_prefix "" {
  policy = "write"
}
