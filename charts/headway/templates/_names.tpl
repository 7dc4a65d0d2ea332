{{/* Every object's name begins with this: the release's, which Helm limits to 53 characters, with "-headway" where
it does not say so itself. Cut to 55, so that a Service, which may have 63, has room for "-metrics"; at least "-h"
stays, so that no two releases share a name. */}}
{{- define "headway.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 55 }}{{ end }}
{{- end }}

{{- define "headway.serviceAccountName" -}}
{{- dig "name" "" (.Values.serviceAccount | default dict) | default (include "headway.name" .) }}
{{- end }}

{{- define "headway.selectorLabels" -}}
app.kubernetes.io/name: headway-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "headway.labels" -}}
{{ include "headway.selectorLabels" . }}
{{- /* A label has no "+", which stands before the metadata of a build. */}}
app.kubernetes.io/version: {{ .Chart.AppVersion | replace "+" "_" | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{/* A full image reference; call it with (list . IMAGE). A digest says which image, and a tag beside it which one it was. */}}
{{- define "headway.image" -}}
{{- $root := index . 0 }}{{ $image := index . 1 -}}
{{ with $root.Values.imageRegistry }}{{ . | trimSuffix "/" }}/{{ end }}{{ $image.repository }}
{{- if and $image.digest (not $image.tag) }}@{{ $image.digest }}
{{- else }}:{{ $image.tag | default $root.Chart.AppVersion }}{{ with $image.digest }}@{{ . }}{{ end }}
{{- end }}
{{- end }}

{{- define "headway.gatewayImage" -}}
{{- include "headway.image" (list . (ternary .Values.gatewayImage .Values.image (ne .Values.gatewayImage.repository ""))) }}
{{- end }}

{{/* Whether the Prometheus operator's objects are made: "true" or "false". */}}
{{- define "headway.hasMonitoring" -}}
{{- $wanted := toString .Values.monitoring.enabled -}}
{{- if eq $wanted "auto" }}{{ .Capabilities.APIVersions.Has "monitoring.coreos.com/v1" }}{{ else }}{{ $wanted }}{{ end }}
{{- end }}

{{/* The namespaces to look after, as a JSON array; empty: all of them. */}}
{{- define "headway.namespaces" -}}
{{- $named := .Values.watchNamespaces | default list -}}
{{- with .Values.watchNamespace }}{{ $named = append $named . }}{{ end -}}
{{- $named | uniq | sortAlpha | toJson }}
{{- end }}

{{/* Whether the definitions come with the chart: "true" or "false". Values kept from a chart of before there was
a choice say nothing, which is true. */}}
{{- define "headway.hasCrds" -}}
{{- dig "enabled" true (.Values.crds | default dict) }}
{{- end }}

{{/* Whether roles for people join Kubernetes' own: "true" or "false", likewise. */}}
{{- define "headway.aggregates" -}}
{{- dig "aggregate" true (.Values.rbac | default dict) }}
{{- end }}

{{/* Whether the operator may make LeaderWorkerSets: "true" or "false". */}}
{{- define "headway.hasGroups" -}}
{{- $wanted := toString .Values.leaderWorkerSets -}}
{{- if eq $wanted "auto" }}{{ .Capabilities.APIVersions.Has "leaderworkerset.x-k8s.io/v1" }}{{ else }}{{ $wanted }}{{ end }}
{{- end }}

{{/* What the operator may do where services live; what for stands beside each rule. */}}
{{- define "headway.serviceRules" -}}
# The services and caches themselves are read; only their status is written.
- apiGroups: [serving.headway.dev]
  resources: [inferenceservices, modelcaches]
  verbs: [get, list, watch]
- apiGroups: [serving.headway.dev]
  resources: [inferenceservices/status, modelcaches/status]
  verbs: [patch]
# The children of a service, by server-side apply, and replicas through the scale subresource alone.
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [apps]
  resources: [deployments/scale]
  verbs: [patch]
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, patch, delete]
# Those that a service has for as long as it is there go with it, by their owner: none is deleted.
- apiGroups: [""]
  resources: [services, serviceaccounts, configmaps]
  verbs: [get, list, watch, create, patch]
- apiGroups: [rbac.authorization.k8s.io]
  resources: [roles, rolebindings]
  verbs: [get, list, watch, create, patch]
# Claims of caches, which go with them likewise.
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [get, list, watch, create, patch]
# What stands around their pods.
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
{{- if ne (toString .Values.monitoring.enabled) "false" }}
- apiGroups: [monitoring.coreos.com]
  resources: [podmonitors, prometheusrules]
  verbs: [get, list, watch, create, patch, delete]
{{- end }}
{{- if eq (include "headway.hasGroups" .) "true" }}
# Replicas that span nodes.
- apiGroups: [leaderworkerset.x-k8s.io]
  resources: [leaderworkersets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [leaderworkerset.x-k8s.io]
  resources: [leaderworkersets/scale]
  verbs: [patch]
{{- end }}
# Replicas: why one is not ready, and which one should go first. Evaluations: what their pods left behind.
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, patch]
# How far a fetch is.
- apiGroups: [""]
  resources: [pods/log]
  verbs: [get]
# Whether somebody else's autoscaler works on the same replicas.
- apiGroups: [autoscaling]
  resources: [horizontalpodautoscalers]
  verbs: [list, watch]
# What a gateway may do. The operator grants it, and nobody may grant what he does not hold.
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  verbs: [list, watch]
# Decisions as events on the service; of pods, which probe failed, of claims, why they wait.
- apiGroups: [""]
  resources: [events]
  verbs: [list, create, patch]
{{- end }}
