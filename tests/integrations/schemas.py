"""JSON schemas of the manifests for Kubernetes, gateways and KubeRay.

Written from the reference pages: Kubernetes API v1.37 (`apps/v1` Deployment, `v1` Pod, Service and
PersistentVolumeClaim), Gateway API Inference Extension v1 (`InferencePool`), KubeRay v1.6 (`ray.io/v1` RayService); the
latter two also compared with their CRDs. They allow only the fields that we write, so that a new field is looked up
before it is printed.
"""

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string", "minLength": 1}
YES_NO: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
POSITIVE: Schema = {"type": "integer", "minimum": 1, "maximum": 2**31 - 1}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
NAME: Schema = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
PORT_NAME: Schema = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 15}
QUANTITY: Schema = {"type": "string", "pattern": "^[0-9]+(m|Ki|Mi|Gi|Ti)?$"}
LABEL: Schema = {"type": "string", "maxLength": 63, "pattern": "^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$"}


def one(value: str) -> Schema:
    return {"const": value}


def any_of(*values: str) -> Schema:
    return {"enum": list(values)}


def many(item: Schema, least: int = 0, most: int = 1000) -> Schema:
    return {"type": "array", "items": item, "minItems": least, "maxItems": most}


def by_name(value: Schema) -> Schema:
    return {"type": "object", "additionalProperties": value}


def fields(*required: str, **known: Schema) -> Schema:
    """Return the schema of an object with these fields only."""
    assert set(required) <= known.keys()
    return {"type": "object", "properties": known, "required": list(required), "additionalProperties": False}


LABELS = by_name(LABEL)
SELECTOR = LABELS | {"minProperties": 1, "maxProperties": 64}
METADATA = fields("name", name=NAME, labels=LABELS)
RESOURCES = fields(requests=by_name(QUANTITY), limits=by_name(QUANTITY))
HTTP_GET = fields("port", path=TEXT, port={"anyOf": [PORT, PORT_NAME]})
PROBE = fields("httpGet", httpGet=HTTP_GET, periodSeconds=POSITIVE, timeoutSeconds=POSITIVE, failureThreshold=POSITIVE)
TCP_PROBE = fields(
    "tcpSocket", tcpSocket=fields(port={"anyOf": [PORT, PORT_NAME]}), periodSeconds=POSITIVE, failureThreshold=POSITIVE
)
FROM_SECRET = fields("secretKeyRef", secretKeyRef=fields("key", name=NAME, key=TEXT))
CONTAINER = fields(
    "name",
    "image",
    name=NAME,
    image=TEXT,
    args=many(TEXT),
    command=many(TEXT),
    env=many(fields("name", name=TEXT, value={"type": "string"}, valueFrom=FROM_SECRET)),
    envFrom=many(fields(secretRef=fields("name", name=NAME))),
    ports=many(fields("containerPort", name=PORT_NAME, containerPort=PORT)),
    startupProbe=PROBE,
    readinessProbe=PROBE,
    livenessProbe={"anyOf": [PROBE, TCP_PROBE]},
    resources=RESOURCES,
    securityContext=fields(
        allowPrivilegeEscalation=YES_NO, readOnlyRootFilesystem=YES_NO, capabilities=fields(drop=many(TEXT))
    ),
    volumeMounts=many(fields("name", "mountPath", name=NAME, mountPath=TEXT)),
)
VOLUME = fields(
    "name",
    name=NAME,
    persistentVolumeClaim=fields("claimName", claimName=NAME),
    emptyDir=fields(medium=any_of("", "Memory"), sizeLimit=QUANTITY),
)
POD = fields(
    "containers",
    terminationGracePeriodSeconds=COUNT,
    automountServiceAccountToken=YES_NO,
    securityContext=fields(
        runAsNonRoot=YES_NO,
        runAsUser=COUNT,
        runAsGroup=COUNT,
        fsGroup=COUNT,
        seccompProfile=fields("type", type=any_of("RuntimeDefault", "Unconfined", "Localhost")),
    ),
    containers=many(CONTAINER, 1),
    volumes=many(VOLUME),
    topologySpreadConstraints=many(
        fields(
            "maxSkew",
            "topologyKey",
            "whenUnsatisfiable",
            maxSkew=POSITIVE,
            topologyKey=TEXT,
            whenUnsatisfiable=any_of("DoNotSchedule", "ScheduleAnyway"),
            labelSelector=fields(matchLabels=SELECTOR),
        )
    ),
)
TEMPLATE = fields("spec", metadata=fields(labels=LABELS, annotations=by_name({"type": "string"})), spec=POD)


def document(version: str, kind: str, spec: Schema) -> Schema:
    known = {"apiVersion": one(version), "kind": one(kind), "metadata": METADATA, "spec": spec}
    return fields(*known, **known)


DEPLOYMENT = document(
    "apps/v1",
    "Deployment",
    fields(
        "selector",
        "template",
        replicas=COUNT,
        selector=fields("matchLabels", matchLabels=SELECTOR),
        strategy=fields(
            type=any_of("Recreate", "RollingUpdate"), rollingUpdate=fields(maxUnavailable=COUNT, maxSurge=COUNT)
        ),
        template=TEMPLATE,
    ),
)
SERVICE_PORT = fields("port", name=PORT_NAME, port=PORT, targetPort={"anyOf": [PORT, PORT_NAME]})
SERVICE = document("v1", "Service", fields(selector=SELECTOR, ports=many(SERVICE_PORT, 1)))
CLAIM_SPEC = fields(
    accessModes=many(any_of("ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"), 1),
    resources=fields(requests=by_name(QUANTITY)),
)
CLAIM = document("v1", "PersistentVolumeClaim", CLAIM_SPEC)
STATEFUL_SET = document(
    "apps/v1",
    "StatefulSet",
    fields(
        "selector",
        "template",
        serviceName=NAME,
        replicas=COUNT,
        selector=fields("matchLabels", matchLabels=SELECTOR),
        template=TEMPLATE,
        volumeClaimTemplates=many(fields("metadata", "spec", metadata=fields("name", name=NAME), spec=CLAIM_SPEC)),
    ),
)
# The port is required if the kind is Service, which is the default.
PICKER = fields(
    "name",
    "port",
    group={"type": "string", "maxLength": 253},
    kind=one("Service"),
    name=NAME,
    port=fields("number", number=PORT),
    failureMode=any_of("FailOpen", "FailClose"),
)
POOL = document(
    "inference.networking.k8s.io/v1",
    "InferencePool",
    fields(
        "selector",
        "targetPorts",
        "endpointPickerRef",
        selector=fields("matchLabels", matchLabels=SELECTOR),
        targetPorts=many(fields("number", number=PORT), 1, 8) | {"uniqueItems": True},
        endpointPickerRef=PICKER,
    ),
)
START_PARAMETERS = by_name({"type": "string"})
RAY_SERVICE = document(
    "ray.io/v1",
    "RayService",
    fields(
        "rayClusterConfig",
        upgradeStrategy=fields(type=any_of("NewCluster", "NewClusterWithIncrementalUpgrade", "None")),
        serveConfigV2=TEXT,
        rayClusterConfig=fields(
            "headGroupSpec",
            rayVersion=TEXT,
            authOptions=fields(mode=any_of("disabled", "token"), secretName=NAME),
            enableInTreeAutoscaling=YES_NO,
            gcsFaultToleranceOptions=fields(
                redisAddress=TEXT,
                redisPassword=fields(value=TEXT, valueFrom=FROM_SECRET),
                externalStorageNamespace=TEXT,
            ),
            headGroupSpec=fields("template", rayStartParams=START_PARAMETERS, template=TEMPLATE),
            workerGroupSpecs=many(
                fields(
                    "groupName",
                    "minReplicas",
                    "maxReplicas",
                    "template",
                    groupName=NAME,
                    replicas=COUNT,
                    minReplicas=COUNT,
                    maxReplicas=COUNT,
                    rayStartParams=START_PARAMETERS,
                    template=TEMPLATE,
                )
            ),
        ),
    ),
)
# Config file of Ray Serve: the part of `ServeDeploySchema` that we use.
SERVE_CONFIG = fields(
    "applications",
    proxy_location=any_of("Disabled", "HeadOnly", "EveryNode"),
    http_options=fields(host=TEXT, port=PORT),
    applications=many(
        fields(
            "name",
            "import_path",
            name=TEXT,
            route_prefix={"type": "string", "pattern": "^/"},
            import_path={"type": "string", "pattern": "^[a-z_.]+:[a-z_]+$"},
            args={"type": "object"},
        ),
        1,
    ),
)
KINDS = (DEPLOYMENT, STATEFUL_SET, SERVICE, CLAIM, POOL, RAY_SERVICE)
BY_KIND = {schema["properties"]["kind"]["const"]: schema for schema in KINDS}
