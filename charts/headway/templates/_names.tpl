{{/* Every object's name begins with the release's, which Helm limits to 53 characters. */}}
{{- define "headway.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-{{ .Chart.Name }}{{ end }}
{{- end }}

{{- define "headway.serviceAccountName" -}}
{{- .Values.serviceAccount.name | default (include "headway.name" .) }}
{{- end }}

{{- define "headway.selectorLabels" -}}
app.kubernetes.io/name: headway-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "headway.labels" -}}
{{ include "headway.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{/* A full image reference; call it with (list . IMAGE). */}}
{{- define "headway.image" -}}
{{- $root := index . 0 }}{{ $image := index . 1 -}}
{{ $image.repository }}:{{ $image.tag | default $root.Chart.AppVersion }}
{{- end }}

{{- define "headway.gatewayImage" -}}
{{- include "headway.image" (list . (ternary .Values.gatewayImage .Values.image (ne .Values.gatewayImage.repository ""))) }}
{{- end }}

{{/* What the operator may do where services live; what for stands beside each rule. */}}
{{- define "headway.serviceRules" -}}
# The services themselves: kopf keeps its marks in annotations; the rest goes to the status.
- apiGroups: [serving.headway.dev]
  resources: [inferenceservices]
  verbs: [get, list, watch, patch]
- apiGroups: [serving.headway.dev]
  resources: [inferenceservices/status]
  verbs: [get, patch]
# Owner references that block the owner's deletion need this where that admission check is on.
- apiGroups: [serving.headway.dev]
  resources: [inferenceservices/finalizers]
  verbs: [update]
# The children of a service, by server-side apply.
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [apps]
  resources: [deployments/scale]
  verbs: [get, patch]
- apiGroups: [""]
  resources: [services, serviceaccounts, configmaps]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [rbac.authorization.k8s.io]
  resources: [roles, rolebindings]
  verbs: [get, list, watch, create, patch, delete]
# Replicas: why one is not ready, and which one should go first.
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, patch]
# What a gateway may do. The operator grants it, and nobody may grant what he does not hold.
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  verbs: [get, list, watch]
- apiGroups: ["", events.k8s.io]
  resources: [events]
  verbs: [create, patch]
{{- end }}
