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

{{- define "outrider.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
fsGroup: 10001
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

{{- /* Spreads the pods of one pool over hosts and zones if possible. Takes root and pool. */}}
{{- define "outrider.spread" -}}
{{- range $key := list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
- maxSkew: 1
  topologyKey: {{ $key }}
  whenUnsatisfiable: ScheduleAnyway
  labelSelector:
    matchLabels:
      {{- include "outrider.selector" $.root | nindent 6 }}
      outrider/pool: {{ $.pool }}
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

{{- /* Returns the scaled pools as JSON: Deployment, metric, models, share of the metric, and bounds. */}}
{{- define "outrider.scaled" -}}
{{- $root := . }}
{{- $scaled := list }}
{{- $kinds := list (dict "role" "target" "pools" .Values.targetPools "metric" "outrider_wanted_target_workers" "limits" .Values.scaling.targets) (dict "role" "draft" "pools" .Values.draftPools "metric" "outrider_wanted_draft_workers" "limits" .Values.scaling.drafts) }}
{{- range $kind := $kinds }}
{{- range $pool := $kind.pools }}
{{- $limits := merge (dict) ($pool.scaling | default dict) $kind.limits }}
{{- $name := printf "%s-%s-%s" $root.Release.Name $kind.role $pool.name }}
{{- $scaled = append $scaled (dict "name" $name "metric" $kind.metric "models" ($limits.models | default ".+") "share" ($limits.share | default 1) "min" $limits.min "max" $limits.max) }}
{{- end }}
{{- end }}
{{- toJson $scaled }}
{{- end }}
