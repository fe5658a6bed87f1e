{{- define "kvmesh.name" -}}
{{- printf "%s" .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "kvmesh.labels" -}}
app.kubernetes.io/name: kvmesh
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "kvmesh.selector" -}}
app.kubernetes.io/name: kvmesh
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "kvmesh.placementHost" -}}
{{ include "kvmesh.name" . }}-placement.{{ .Release.Namespace }}.svc
{{- end -}}

{{- define "kvmesh.registry" -}}
kind: {{ .Values.registry.kind }}
{{- if eq .Values.registry.kind "consul" }}
consul: {{ .Values.registry.consul | quote }}
{{- end }}
{{- end -}}

{{- define "kvmesh.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
# The state folder is 0700; a walk over it at each start would open it to the group.
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "kvmesh.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- define "kvmesh.claim" -}}
- metadata: {name: state}
  spec:
    accessModes: [ReadWriteOnce]
    {{- with .storageClass }}
    storageClassName: {{ . | quote }}
    {{- end }}
    resources: {requests: {storage: {{ .size }}}}
{{- end -}}
