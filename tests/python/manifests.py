"""Checks packaging/kubernetes against schemas: what the API server would refuse for
its shape is refused here.

Kubernetes' own kinds by the schemas of kubernetes-validate, unknown fields refused. InferencePool
by the rules below, and by the CRDs in --crds where they are at hand. The files of llm-d's router by
its documentation's rules. What the kinds say of each other has to fit: labels, ports, volumes. Each
checked document is a line of stdout.

usage: manifests.py DIR --configs OUT [--crds DIR]
(OUT gets the configurations inside, for their own programs to check)
"""

import argparse
import ipaddress
import pathlib

import jsonschema
import kubernetes_validate
import yaml

KUBERNETES = "1.37"
POOL = {
    "type": "object",
    "required": ["selector", "targetPorts", "endpointPickerRef"],
    "additionalProperties": False,
    "properties": {
        "appProtocol": {"enum": ["http", "kubernetes.io/h2c"]},
        "selector": {
            "type": "object",
            "required": ["matchLabels"],
            "additionalProperties": False,
            "properties": {"matchLabels": {"type": "object", "minProperties": 1, "additionalProperties": {"type": "string"}}},
        },
        "targetPorts": {"type": "array", "minItems": 1, "maxItems": 8, "items": {"$ref": "#/$defs/port"}},
        "endpointPickerRef": {
            "type": "object",
            # A Service, which is the default, has a port.
            "required": ["name", "port"],
            "additionalProperties": False,
            "properties": {
                "name": {"type": "string", "minLength": 1, "maxLength": 253},
                "port": {"$ref": "#/$defs/port"},
                "failureMode": {"enum": ["FailOpen", "FailClose"]},
            },
        },
    },
    "$defs": {
        "port": {
            "type": "object",
            "required": ["number"],
            "additionalProperties": False,
            "properties": {"number": {"type": "integer", "minimum": 1, "maximum": 65535}},
        },
    },
}


def expect(condition, *words):
    if not condition:
        raise SystemExit("manifests: " + " ".join(map(str, words)))


def read(path):
    return list(yaml.safe_load_all(path.read_text()))


def closed(schema):
    """A CRD's schema with unknown fields refused, where it names any."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and "additionalProperties" not in schema:
        made["additionalProperties"] = False
    return made


def check_crd(document, crds):
    group, version = document["apiVersion"].split("/")
    for path in sorted(crds.glob("*.yaml")):
        spec = read(path)[0]["spec"]
        if spec["group"] != group or spec["names"]["kind"] != document["kind"]:
            continue
        schemas = {one["name"]: one["schema"]["openAPIV3Schema"] for one in spec["versions"]}
        # Metadata is the API server's to check.
        rest = {key: value for key, value in document.items() if key != "metadata"}
        jsonschema.validate(rest, closed(schemas[version]))
        print(f"{document['kind']} by its CRD")
        return
    raise SystemExit(f"manifests: no CRD of {document['kind']} in {crds}")


def check_pod(deployment, configs, services):
    spec = deployment["spec"]
    labels = spec["template"]["metadata"]["labels"].items()
    for selector in (spec["selector"]["matchLabels"], *(service["spec"]["selector"] for service in services)):
        expect(selector.items() <= labels, "no pod has", selector)
    pod = spec["template"]["spec"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    expect(all(volume["configMap"]["name"] in configs for volume in volumes.values() if "configMap" in volume), volumes)
    mounted = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
    expect(mounted == set(volumes), "volumes", set(volumes), "but mounted", mounted)
    ports = {port["name"]: port["containerPort"] for container in pod["containers"] for port in container.get("ports", ())}
    for service in services:
        expect(all(port["targetPort"] in ports for port in service["spec"]["ports"]), "no container has", service["spec"]["ports"])
    return dict(labels), set(ports.values())


def check_llm_d(directory):
    (config,), (endpoints,) = read(directory / "epp.yaml"), read(directory / "endpoints.yaml")
    expect(config["kind"] == "EndpointPickerConfig" and config["apiVersion"] == "llm-d.ai/v1alpha1", config)
    declared = {plugin.get("name", plugin["type"]) for plugin in config["plugins"]}
    expect(len(declared) == len(config["plugins"]), "two plugins of one name", declared)
    layer = config["dataLayer"]
    used = [one["pluginRef"] for profile in config["schedulingProfiles"] for one in profile["plugins"]]
    used += [layer["discovery"]["pluginRef"]]
    used += [one["pluginRef"] for source in layer["sources"] for one in (source, *source["extractors"])]
    expect(set(used) <= declared, "not declared:", set(used) - declared)
    print("EndpointPickerConfig")
    known = {"name", "namespace", "address", "port", "labels"}
    names = [one["name"] for one in endpoints["endpoints"]]
    expect(len(set(names)) == len(names), "two endpoints of one name", names)
    for one in endpoints["endpoints"]:
        expect(set(one) <= known, "unknown:", set(one) - known)
        ipaddress.IPv4Address(one["address"])
        expect(isinstance(one["port"], str) and 0 < int(one["port"]) < 65536, "port", one["port"])
        expect(one["labels"]["llm-d.ai/engine-type"] == "vllm", "labels", one["labels"])
    print("endpoints")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("dir", type=pathlib.Path)
    parser.add_argument("--configs", type=pathlib.Path, required=True)
    parser.add_argument("--crds", type=pathlib.Path)
    options = parser.parse_args()
    documents = read(options.dir / "daemon.yaml")
    for document in documents:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
        print(document["kind"])
    of = lambda kind: [document for document in documents if document["kind"] == kind]  # noqa: E731
    configs = {config["metadata"]["name"]: config["data"] for config in of("ConfigMap")}
    for name, files in configs.items():
        for file, text in files.items():
            (options.configs / f"{name}-{file}").write_text(text)
    (deployment,) = of("Deployment")
    labels, ports = check_pod(deployment, configs, of("Service"))

    (pool,) = read(options.dir / "inferencepool.yaml")
    expect(pool["apiVersion"] == "inference.networking.k8s.io/v1" and pool["kind"] == "InferencePool", pool)
    jsonschema.validate(pool["spec"], POOL)
    print(pool["kind"])
    expect(pool["spec"]["selector"]["matchLabels"].items() <= labels.items(), "the pool has no pod")
    expect({port["number"] for port in pool["spec"]["targetPorts"]} <= ports, "the pool's port is none of", ports)
    if options.crds:
        check_crd(pool, options.crds)
    check_llm_d(options.dir / "llm-d")


if __name__ == "__main__":
    main()
