{{- define "masw.selector" -}}
app.kubernetes.io/name: masw
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: server
{{- end }}

{{- define "masw.labels" -}}
app.kubernetes.io/name: masw
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- /* What every pod has; it speaks to no Kubernetes API. */}}
{{- define "masw.pod" -}}
automountServiceAccountToken: false
terminationGracePeriodSeconds: {{ .Values.gracePeriodSeconds }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- if .Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml .Values.image.pullSecrets | nindent 2 }}
{{- end }}
{{- if .Values.nodeSelector }}
nodeSelector:
  {{- toYaml .Values.nodeSelector | nindent 2 }}
{{- end }}
{{- if .Values.tolerations }}
tolerations:
  {{- toYaml .Values.tolerations | nindent 2 }}
{{- end }}
volumes:
  - name: root
    persistentVolumeClaim:
      claimName: {{ .Values.root.claim }}
  - name: recipe
    configMap:
      name: {{ .Release.Name }}-recipe
  - name: shm
    emptyDir:
      medium: Memory
      sizeLimit: {{ .Values.sharedMemory }}
  {{- if .Values.multiNode.enabled }}
  - name: ssh
    secret:
      secretName: {{ .Values.multiNode.sshSecret }}
      defaultMode: 288
  {{- end }}
{{- end }}

{{- /* What every container has. */}}
{{- define "masw.container" -}}
image: "{{ .Values.image.repository }}:{{ .Values.image.tag }}"
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  capabilities:
    drop: [ALL]
env:
  - name: MASW_HTTP_PORT
    value: {{ .Values.ports.http | quote }}
  - name: MASW_METRICS_PORT
    value: {{ .Values.ports.metrics | quote }}
  - name: MASW_READY_SECONDS
    value: {{ .Values.readySeconds | quote }}
  - name: MASW_DRAIN_SECONDS
    value: {{ .Values.drainSeconds | quote }}
  {{- if .Values.multiNode.enabled }}
  - name: MASW_GPUS
    value: {{ .Values.gpus | quote }}
  - name: MASW_SSH
    value: /etc/masw-ssh
  - name: MASW_SSH_PORT
    value: {{ .Values.multiNode.sshPort | quote }}
  {{- end }}
resources:
  requests:
    cpu: {{ .Values.resources.cpu | quote }}
    memory: {{ .Values.resources.memory }}
  limits:
    memory: {{ .Values.resources.memory }}
    nvidia.com/gpu: {{ .Values.gpus }}
volumeMounts:
  - name: root
    mountPath: {{ .Values.root.path }}
  - name: recipe
    mountPath: /etc/masw
    readOnly: true
  - name: shm
    mountPath: /dev/shm
  {{- if .Values.multiNode.enabled }}
  - name: ssh
    mountPath: /etc/masw-ssh
    readOnly: true
  {{- end }}
{{- end }}

{{- /* What the container that answers has besides. */}}
{{- define "masw.serving" -}}
ports:
  - name: http
    containerPort: {{ .Values.ports.http }}
  - name: grpc
    containerPort: {{ .Values.ports.grpc }}
  - name: metrics
    containerPort: {{ .Values.ports.metrics }}
startupProbe:
  httpGet:
    path: /v2/health/live
    port: http
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: {{ .Values.startupProbes }}
livenessProbe:
  httpGet:
    path: /v2/health/live
    port: http
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- /* /v2/health/ready, and a canary: one token, unless others are being emitted */}}
readinessProbe:
  exec:
    command: [/opt/masw/deploy/ready.sh, "8"]
  periodSeconds: 15
  timeoutSeconds: 15
  failureThreshold: 3
lifecycle:
  preStop:
    exec:
      command: [/opt/masw/deploy/drain.sh, {{ .Values.drainSeconds | quote }}]
{{- end }}
