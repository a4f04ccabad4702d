// Streams, cancels, sets a deadline, reads what an error says, and watches health: node client.js ADDRESS
import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const protos = ["", "/vendored"].map((folder) => fileURLToPath(new URL(`../../../protos${folder}`, import.meta.url)));
const definition = protoLoader.loadSync(
  ["chairlift/v1/generation_service.proto", "google/rpc/error_details.proto", "grpc/health/v1/health.proto"],
  { includeDirs: protos, keepCase: true, enums: String, longs: String },
);
const api = grpc.loadPackageDefinition(definition);
const address = process.argv[2];
const credentials = grpc.credentials.createInsecure();
const generation = new api.chairlift.v1.GenerationService(address, credentials);
const health = new api.grpc.health.v1.Health(address, credentials);
const print = (line) => console.log(JSON.stringify(line));

/** The messages of google.rpc.Status's details, by name; none where the service did not speak. */
function errorDetails(error) {
  const [bytes] = error.metadata.get("grpc-status-details-bin");
  const { details = [] } = bytes ? definition["google.rpc.Status"].deserialize(bytes) : {};
  return Object.fromEntries(
    details.map(({ type_url, value }) => {
      const name = type_url.split("/").pop();
      return [name, definition[name]?.deserialize(value)];
    }),
  );
}

const short = { text: "the quick brown fox", max_new_tokens: 12, sampling: { temperature: 0 }, stop: { ignore_eos: true } };
const long = { ...short, max_new_tokens: 8000 };

for await (const event of generation.Generate({ request: short })) print(event);

// Leaving a call cancels its request.
const abandoned = generation.Generate({ request: long });
try {
  for await (const _ of abandoned) abandoned.cancel();
} catch (error) {
  print({ cancelled: { code: error.code } });
}

// The deadline reaches the scheduler.
try {
  for await (const _ of generation.Generate({ request: long }, { deadline: Date.now() + 200 }));
} catch (error) {
  print({ deadline: { code: error.code } });
}

try {
  for await (const _ of generation.Generate({ request: { ...short, sampling: { top_p: 2 } } }));
} catch (error) {
  const { "google.rpc.ErrorInfo": info, "google.rpc.BadRequest": badRequest } = errorDetails(error);
  print({ refused: { code: error.code, reason: info?.reason } });
  for (const violation of badRequest?.field_violations ?? []) print({ violation });
}

// The watch tells every change; here it is left when the service stops serving.
const watch = health.Watch({ service: "" });
watch.on("data", ({ status }) => {
  print({ health: status });
  if (status !== "SERVING") watch.cancel();
});
watch.on("error", (error) => {
  if (error.code !== grpc.status.CANCELLED) throw error;
});
