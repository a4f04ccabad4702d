// Streams, cancels, sets a deadline, reads what an error says, and watches health: client ADDRESS
#include <google/protobuf/util/json_util.h>
#include <grpcpp/grpcpp.h>

#include <chrono>
#include <iostream>
#include <string>

#include "chairlift/v1/generation_service.grpc.pb.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "grpc/health/v1/health.grpc.pb.h"

using grpc::health::v1::HealthCheckResponse;

void print(const std::string& name, const std::string& json) {
  std::cout << "{\"" << name << "\": " << json << "}" << std::endl;
}

std::string to_json(const google::protobuf::Message& message) {
  google::protobuf::util::JsonPrintOptions options;
  options.preserve_proto_field_names = true;
  std::string json;
  (void)google::protobuf::util::MessageToJsonString(message, &json, options);
  return json;
}

std::string code_of(const grpc::Status& status) { return "{\"code\": " + std::to_string(status.error_code()) + "}"; }

// Hands each event to `on_event`, and returns what the stream ended with.
template <typename OnEvent>
grpc::Status generate(chairlift::v1::GenerationService::Stub& stub, grpc::ClientContext& context,
                      const chairlift::v1::GenerateRequest& request, OnEvent on_event) {
  const auto stream = stub.Generate(&context, request);
  for (chairlift::v1::GenerateResponse event; stream->Read(&event);) on_event(event);
  return stream->Finish();
}

int main(int, char* argv[]) {
  const auto channel = grpc::CreateChannel(argv[1], grpc::InsecureChannelCredentials());
  const auto stub = chairlift::v1::GenerationService::NewStub(channel);
  grpc::ClientContext streaming, leaving, late, refused, watching;  // one for each call
  chairlift::v1::GenerateRequest message;
  auto& request = *message.mutable_request();
  request.set_text("the quick brown fox");
  request.mutable_sampling()->set_temperature(0);
  request.mutable_stop()->set_ignore_eos(true);

  request.set_max_new_tokens(12);
  const auto ended = generate(*stub, streaming, message, [](const auto& e) { std::cout << to_json(e) << std::endl; });
  if (!ended.ok()) return 1;

  request.set_max_new_tokens(8000);  // leaving a call cancels its request
  print("cancelled", code_of(generate(*stub, leaving, message, [&](const auto&) { leaving.TryCancel(); })));

  late.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(200));  // it reaches the scheduler
  print("deadline", code_of(generate(*stub, late, message, [](const auto&) {})));

  request.mutable_sampling()->set_top_p(2);
  const auto refusal = generate(*stub, refused, message, [](const auto&) {});
  google::rpc::Status status;
  google::rpc::ErrorInfo info;
  google::rpc::BadRequest bad_request;
  status.ParseFromString(refusal.error_details());
  for (const auto& detail : status.details()) detail.UnpackTo(&info) || detail.UnpackTo(&bad_request);
  print("refused", "{\"code\": " + std::to_string(refusal.error_code()) + ", \"reason\": \"" + info.reason() + "\"}");
  for (const auto& violation : bad_request.field_violations()) print("violation", to_json(violation));

  // The watch tells every change; here it is left when the service stops serving.
  const auto watch = grpc::health::v1::Health::NewStub(channel)->Watch(&watching, {});
  for (HealthCheckResponse health; watch->Read(&health);) {
    print("health", "\"" + HealthCheckResponse::ServingStatus_Name(health.status()) + "\"");
    if (health.status() != HealthCheckResponse::SERVING) watching.TryCancel();
  }
  return watch->Finish().error_code() == grpc::StatusCode::CANCELLED ? 0 : 1;
}
