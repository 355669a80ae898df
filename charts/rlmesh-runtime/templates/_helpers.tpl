{{- define "rlmesh.labels" -}}
app.kubernetes.io/name: {{ .name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/part-of: rlmesh-runtime
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{- define "rlmesh.selector" -}}
app.kubernetes.io/name: {{ . }}
app.kubernetes.io/part-of: rlmesh-runtime
{{- end }}

{{- define "rlmesh.image" -}}
{{- $image := index .root.Values.images .name -}}
{{- $registry := default .root.Values.platform.registryHost .root.Values.images.registry -}}
{{- if $image.digest -}}
{{ printf "%s/%s@%s" $registry $image.repository $image.digest }}
{{- else -}}
{{ printf "%s/%s:%s" $registry $image.repository (default .root.Chart.AppVersion $image.tag) }}
{{- end -}}
{{- end }}

{{/* OpenShift gives each namespace a range of users of its own. */}}
{{- define "rlmesh.picksUsers" -}}
{{- if .Capabilities.APIVersions.Has "security.openshift.io/v1" }}true{{ end }}
{{- end }}

{{- define "rlmesh.podSecurity" -}}
runAsNonRoot: true
{{- if not (include "rlmesh.picksUsers" .) }}
runAsUser: {{ int64 .Values.podSecurity.runAsUser }}
runAsGroup: {{ int64 .Values.podSecurity.runAsUser }}
fsGroup: {{ int64 .Values.podSecurity.fsGroup }}
fsGroupChangePolicy: OnRootMismatch
{{- end }}
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "rlmesh.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* Every pod of ours: where our images run. */}}
{{- define "rlmesh.nodes" -}}
kubernetes.io/os: linux
kubernetes.io/arch: amd64
{{- end }}

{{- define "rlmesh.dns" -}}
- to:
    {{- toYaml .Values.network.dnsPeers | nindent 4 }}
  ports:
    {{- range .Values.network.dnsPorts }}
    - {port: {{ . }}, protocol: UDP}
    - {port: {{ . }}, protocol: TCP}
    {{- end }}
{{- end }}

{{/* Where the control plane is: 443 unless platform.apiHost says otherwise. */}}
{{- define "rlmesh.apiPort" -}}
{{ regexFind ":[0-9]+$" .Values.platform.apiHost | trimPrefix ":" | default "443" }}
{{- end }}

{{/* Without `to`: what a Service's address becomes differs, and some networks match no nodes by address. */}}
{{- define "rlmesh.kubernetesApi" -}}
- ports:
    {{- range .Values.network.apiServerPorts }}
    - {port: {{ . }}, protocol: TCP}
    {{- end }}
{{- end }}
