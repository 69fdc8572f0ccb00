"""Reads batches of spans, one a line, as OpenTelemetry's own messages: fields that
they do not have are refused.

usage: otlp_takes.py FILE
"""

import base64
import json
import sys

from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

IDENTIFIERS = ("traceId", "spanId", "parentSpanId")


def standard(value):
    """OTLP has identifiers in hexadecimal where JSON of other messages has bytes in base64."""
    if isinstance(value, list):
        return [standard(one) for one in value]
    if isinstance(value, dict):
        return {key: base64.b64encode(bytes.fromhex(one)).decode() if key in IDENTIFIERS else standard(one)
                for key, one in value.items()}
    return value


taken = 0
with open(sys.argv[1]) as batches:
    for batch in batches:
        request = json_format.ParseDict(standard(json.loads(batch)), ExportTraceServiceRequest())
        for span in request.resource_spans[0].scope_spans[0].spans:
            if len(span.trace_id) != 16 or len(span.span_id) != 8 or span.start_time_unix_nano > span.end_time_unix_nano:
                raise SystemExit(f"otlp_takes: {span}")
            taken += 1
print(taken, "spans")
