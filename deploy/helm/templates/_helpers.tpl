{{- define "outrider.labels" -}}
app.kubernetes.io/name: outrider
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "outrider.selector" -}}
app.kubernetes.io/name: outrider
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "outrider.discovery" -}}
{{- if .Values.etcd.enabled -}}
etcd://{{ .Release.Name }}-etcd:2379/outrider
{{- else -}}
{{ required "etcd.endpoints is required if etcd.enabled is false" .Values.etcd.endpoints }}/outrider
{{- end -}}
{{- end }}

{{- /* All addresses of a pod. */}}
{{- define "outrider.anyAddress" -}}
{{- ternary "[::]" "0.0.0.0" (eq .Values.ipFamily "IPv6") }}
{{- end }}

{{- define "outrider.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: { type: RuntimeDefault }
{{- end }}

{{- define "outrider.containerSecurity" -}}
allowPrivilegeEscalation: false
capabilities: { drop: [ALL] }
readOnlyRootFilesystem: true
{{- end }}

{{- /* Returns the Secret of the certificate that routers present to workers: their own, or the workers'. Empty without
       mutual TLS. */}}
{{- define "outrider.routersSecret" -}}
{{- if and .Values.tls.routersSecret (not .Values.tls.workersSecret) }}
{{- fail "tls.routersSecret needs tls.workersSecret: workers that accept only the routers' certificate have one of their own" }}
{{- end }}
{{- .Values.tls.routersSecret | default .Values.tls.workersSecret }}
{{- end }}

{{- /* Volume for mutual TLS between routers and workers. Takes own, the Secret of the pod's certificate and key, and
       peer, the Secret whose ca.crt is the authority of the other side's certificate. */}}
{{- define "outrider.workersTls" -}}
- name: workers-tls
  projected:
    defaultMode: 0440
    sources:
      - secret: { name: {{ .own }}, items: [{ key: tls.crt, path: tls.crt }, { key: tls.key, path: tls.key }] }
      - secret: { name: {{ .peer }}, items: [{ key: ca.crt, path: ca.crt }] }
{{- end }}

{{- define "outrider.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (ternary .Release.Name "" .Values.serviceAccount.create) }}
{{- end }}

{{- /* Labels and annotations of a pod. Takes root, pool, target and role (or none), values (of the router, of etcd
       or of a pool) and the chart's annotations, which the values may override. */}}
{{- define "outrider.podMetadata" -}}
labels:
  {{- include "outrider.labels" .root | nindent 2 }}
  outrider/pool: {{ .pool }}
  {{- with .target }}
  outrider/target: {{ . | quote }}
  {{- end }}
  {{- with .role }}
  outrider/role: {{ . }}
  {{- end }}
  {{- with .values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with merge (dict) (.values.podAnnotations | default dict) (.annotations | default dict) }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* Who a pod is, and where it may run. Takes root, pool and values, as above. */}}
{{- define "outrider.podSpec" -}}
{{- with include "outrider.serviceAccount" .root }}
serviceAccountName: {{ . }}
{{- end }}
automountServiceAccountToken: false
# A Service named outrider would otherwise set variables with the prefix of our settings, OUTRIDER_.
enableServiceLinks: false
securityContext: {{- include "outrider.podSecurity" .root | nindent 2 }}
{{- with include "outrider.spread" . }}
topologySpreadConstraints: {{- . | nindent 2 }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .root.Values.images.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* Spreads the pods of one pool over hosts and zones if possible, or as its values say. A constraint without a
       labelSelector gets that of the pool. Takes root, pool and values. */}}
{{- define "outrider.spread" -}}
{{- $selector := dict "matchLabels" (merge (dict "outrider/pool" .pool) (include "outrider.selector" .root | fromYaml)) }}
{{- $constraints := list }}
{{- range $key := list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
{{- $constraints = append $constraints (dict "maxSkew" 1 "topologyKey" $key "whenUnsatisfiable" "ScheduleAnyway") }}
{{- end }}
{{- if hasKey .values "topologySpreadConstraints" }}
{{- $constraints = .values.topologySpreadConstraints }}
{{- end }}
{{- range $constraints }}
- {{- toYaml . | nindent 2 }}
  {{- if not (hasKey . "labelSelector") }}
  labelSelector: {{- toYaml $selector | nindent 4 }}
  {{- end }}
{{- end }}
{{- end }}

{{- /* Renders a value of router.config as TOML. toToml would write whole numbers of a values file as 6.0. */}}
{{- define "outrider.toml" -}}
{{- if kindIs "map" . -}}
{ {{- $comma := "" }}{{ range $key, $value := . }}{{ $comma }} {{ toJson $key }} = {{ include "outrider.toml" $value }}{{ $comma = "," }}{{ end }} }
{{- else if kindIs "slice" . -}}
[ {{- $comma := "" }}{{ range . }}{{ $comma }} {{ include "outrider.toml" . }}{{ $comma = "," }}{{ end }} ]
{{- else if kindIs "invalid" . -}}
{{ fail "router.config has a key without a value" }}
{{- else -}}
{{ toJson . }}
{{- end }}
{{- end }}

{{- define "outrider.routerConfig" -}}
{{- range $key, $value := .Values.router.config }}
{{ toJson $key }} = {{ include "outrider.toml" $value }}
{{- end }}
{{- end }}

{{- /* Returns the compute threads of a pool's worker: as set, or the whole cores of its CPU request, which is the CPU
       limit if none is given. Empty if there is neither. */}}
{{- define "outrider.threads" -}}
{{- $requests := .resources.requests | default dict }}
{{- $limits := .resources.limits | default dict }}
{{- $cpu := $requests.cpu | default $limits.cpu | default "" | toString }}
{{- if .threads }}
{{- .threads }}
{{- else if hasSuffix "m" $cpu }}
{{- max 1 (div (int (trimSuffix "m" $cpu)) 1000) }}
{{- else if $cpu }}
{{- max 1 (int (floor (float64 $cpu))) }}
{{- end }}
{{- end }}

{{- /* Returns the scaled pools as JSON: Deployment, metric, models, share of the metric, and bounds. Pools whose
       targets have several nodes are not scaled: they have no Deployment. */}}
{{- define "outrider.scaled" -}}
{{- $root := . }}
{{- $scaled := list }}
{{- $kinds := list (dict "role" "target" "pools" .Values.targetPools "metric" "outrider_wanted_target_workers" "limits" .Values.scaling.targets) (dict "role" "draft" "pools" .Values.draftPools "metric" "outrider_wanted_draft_workers" "limits" .Values.scaling.drafts) }}
{{- range $kind := $kinds }}
{{- range $pool := $kind.pools }}
{{- if le (int ($pool.nodes | default 1)) 1 }}
{{- $limits := merge (dict) ($pool.scaling | default dict) $kind.limits }}
{{- $name := printf "%s-%s-%s" $root.Release.Name $kind.role $pool.name }}
{{- $scaled = append $scaled (dict "name" $name "metric" $kind.metric "models" ($limits.models | default ".+") "share" ($limits.share | default 1) "min" $limits.min "max" $limits.max) }}
{{- end }}
{{- end }}
{{- end }}
{{- toJson $scaled }}
{{- end }}
